__version__ = version = "0.22.1"
