"""fastweights: hybrid language models whose layers keep a fixed-size, error-correcting memory."""

__version__ = "0.1.0"
