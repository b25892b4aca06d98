import numpy as np
import pytest
from scipy.signal import lfilter

from tokenyard.statistics.recursion import autoregression


@pytest.mark.parametrize("shape", [(1,), (2,), (500,), (40, 3)])
def test_an_autoregression_is_the_filter_of_that_recursion(shape):
    noise = np.random.default_rng(0).normal(size=shape)
    expected = lfilter([1.0], [1.0, -0.6, -0.3], noise, axis=0)
    np.testing.assert_allclose(autoregression(noise, 0.6, 0.3), expected, rtol=1e-12)
    np.testing.assert_array_equal(noise, np.random.default_rng(0).normal(size=shape))
