# scikit-learn ships no types, and takes those of arguments for those of their defaults.
