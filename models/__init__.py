"""Model folders that ship with the package, and how the sample model was trained."""
