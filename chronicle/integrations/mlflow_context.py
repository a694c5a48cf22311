"""The tags by which a script's own MLflow run is found beside the launch that made it.

MLflow asks every `mlflow.run_context_provider` of the installed packages when a run begins. Under `chronicle run` ours answers
with the run, its directory and the launch, so that `tags."chronicle.run" = 'tr-190'` finds the user's own runs. Nothing is
imported here: MLflow loads this in every process that logs.
"""

import os


class LaunchContext:
    """MLflow's `RunContextProvider`, which MLflow does not ask to be inherited from."""

    def in_context(self) -> bool:
        """Whether this process belongs to a launch of chronicle."""
        return bool(os.environ.get("CHRONICLE_RUN_DIR")) and os.environ.get("CHRONICLE_LAUNCH", "").isdecimal()

    def tags(self) -> dict[str, str]:
        """The run's name and directory, and the number of the launch."""
        directory = os.environ["CHRONICLE_RUN_DIR"]
        return {
            "chronicle.run": os.path.basename(directory),
            "chronicle.run_dir": directory,
            "chronicle.launch": os.environ["CHRONICLE_LAUNCH"],
        }
