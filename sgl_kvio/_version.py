"""The one home of the package version; setup.py reads it as text."""

__version__ = "0.1.0"
