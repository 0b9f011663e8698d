"""The version of flashbpt, read by the build without importing the package."""

__version__ = "0.1.0"
