"""What kgen raises on purpose: one sentence each, saying what is wrong and what to do."""

from __future__ import annotations


class KgenError(Exception):
    """Base of every error that the command line prints as one sentence, without a traceback."""


class ConfigError(KgenError):
    """A YAML file, a template or an argument holds something that kgen cannot use; the text names file and path."""


class RecordError(KgenError):
    """A record file cannot be written or does not belong to what is asked."""


class BuildError(KgenError):
    """A kernel could not be rendered or compiled."""
