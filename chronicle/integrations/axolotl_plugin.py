"""axolotl: `plugins: [chronicle.integrations.axolotl_plugin.ChroniclePlugin]` in the configuration.

Under `chronicle run` the guard is there without it; the plugin adds axolotl's whole configuration to its settings.
"""

import os
from typing import Any

from axolotl.integrations.base import BasePlugin

from chronicle.recording import start


class ChroniclePlugin(BasePlugin):  # type: ignore[misc]
    """Records the configuration; adds the guard's callback where `CHRONICLE_RUN` or `CHRONICLE_RUN_DIR` names a run."""

    def pre_model_load(self, cfg: Any) -> None:
        """The configuration is complete here: defaults are filled in, paths resolved."""
        start().add_settings("axolotl", {name: value for name, value in dict(cfg).items() if value is not None})

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The guard. A Trainer under `chronicle run` that has it gets no second one."""
        if not os.environ.keys() & {"CHRONICLE_RUN", "CHRONICLE_RUN_DIR"}:
            return []
        from chronicle.resume.transformers import ChronicleCallback

        return [ChronicleCallback()]
