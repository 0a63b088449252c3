"""The measured numbers of the pages, from one file.

`pmaf bench NAME --figures docs/figures.json` puts the rows of a race into the file, and
`python -m pmaf_lab.figures` fills the pages from it. `record` holds the rows, `tables` makes tables
of them, and `pages` finds the places in the Markdown.
"""
