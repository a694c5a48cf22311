"""What all tests share: generated examples are the same in every run, unless HYPOTHESIS_PROFILE=explore asks for new ones."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
