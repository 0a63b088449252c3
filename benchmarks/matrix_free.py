"""Solves by products alone at full size: sparse graphs up to ten million entries, and PCA.

    python benchmarks/matrix_free.py [--quick] [--out DIR]

Runs the items `graphs` and `pca` of `pmaf bench` and nothing else: times of both passes against
the number of entries with the fitted slope, memory, and times and residuals beside SciPy's
`eigsh` and `eigs`, `torch.lobpcg`, and scikit-learn's `PCA` and `TruncatedSVD`. Cells are saved
as they finish, so that an interrupted run goes on where it was; the report has the plot.
The largest takes about 6 GB of memory.
"""

import sys

from pmaf.__main__ import main

if __name__ == "__main__":
    sys.argv[1:] = ["bench", "graphs", "pca", *sys.argv[1:]]
    main()
