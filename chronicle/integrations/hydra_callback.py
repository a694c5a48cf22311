"""The composed configuration of a Hydra job as settings of the launch, by Hydra's own callbacks; no change in the script.

    python train.py lr=3e-4 +hydra.callbacks.chronicle._target_=chronicle.integrations.hydra_callback.ChronicleCallback
"""

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from chronicle.recording import start


class ChronicleCallback(Callback):  # type: ignore[misc]
    """Named in `hydra.callbacks`. Nothing it does ends a job, and outside `chronicle run` it does nothing."""

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Record the user's part of the configuration; an interpolation that cannot be resolved stays as it is written."""
        if start().run is not None:
            start().add_settings("Hydra", _plain(config))


def _plain(config: Any) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(config, resolve=True)
    except Exception:  # noqa: BLE001 a resolver is a stranger's code
        found = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in found.items() if name != "hydra"} if isinstance(found, dict) else {}
