"""Configuration: fields, checks and files. An unknown or contradictory value is an error."""

from qerl_jax.config.fields import Config, descriptions
from qerl_jax.config.files import FREE_ON_RESUME, differences, dump, load, to_mapping
from qerl_jax.config.values import ConfigError

__all__ = [
    "FREE_ON_RESUME",
    "Config",
    "ConfigError",
    "descriptions",
    "differences",
    "dump",
    "load",
    "to_mapping",
]
