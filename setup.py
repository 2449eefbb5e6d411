"""The folders at the top of the repository, installed and imported as `laserbatch.<folder>`."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("pipeline", "retrieval_pools", "ctr", "jobs", "research", "configs", "models")
# Folders of nothing but data count too: prompt templates, the sample model.
packages = find_namespace_packages(
    include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")], exclude=["*.__pycache__"]
)

setup(
    packages=[f"laserbatch.{package}" for package in packages],
    package_dir={f"laserbatch.{folder}": folder for folder in FOLDERS},
)
