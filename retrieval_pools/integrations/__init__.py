"""The pools inside other engines: files that only the engine in question imports."""
