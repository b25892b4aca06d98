"""What all tests share."""

from hypothesis import settings

# The first call of a compiled function loads it, and machines that run tests are shared: how long
# one example takes says nothing.
settings.register_profile("tokenyard", deadline=None)
settings.load_profile("tokenyard")
