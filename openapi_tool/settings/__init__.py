"""Settings: model, sources and validation errors."""

from openapi_tool.environment import CONFIG_VARIABLE, KERNEL_CONFIG_VARIABLE, PREFIX, SHORT_NAMES
from openapi_tool.settings.loading import given_values, load_settings
from openapi_tool.settings.model import Settings
from openapi_tool.settings_error import SettingsError

__all__ = [
    "CONFIG_VARIABLE",
    "KERNEL_CONFIG_VARIABLE",
    "PREFIX",
    "SHORT_NAMES",
    "Settings",
    "SettingsError",
    "given_values",
    "load_settings",
]
