"""What all tests share: generated examples are the same in every run, unless HYPOTHESIS_PROFILE=explore asks for new ones."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
