"""The pools inside other engines, a file each, which that engine alone imports."""
