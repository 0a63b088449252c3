"""The paper's experiments: its data, its methods under its own row names, its tables.

The paper is Xu, Wang, Liu and Gould, *PMaF: Deep Declarative Layers for Principal
Matrix Features*, 2023.
"""
