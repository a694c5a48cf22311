"""One file for each framework: how the guard sees its saves, its loads and its optimizer steps."""
