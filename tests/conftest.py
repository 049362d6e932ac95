import pytest
import torch


@pytest.fixture(autouse=True)
def _plain_state():
    """Every test starts from the same generator, on one thread, and leaves torch's global settings as they were."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
