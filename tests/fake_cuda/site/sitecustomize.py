"""Python imports this by itself: so the children of a process with the fake CUDA device have it, too."""

import os

if "FAKE_CUDA" in os.environ:
    from tests.fake_cuda import loading

    loading.install()
