"""Every way to hold crossed with everything that may happen to it; README.rst says how to add a row or a column."""
