"""Train language-model agents through the harness they will be deployed in."""

__version__ = "0.1.0"
