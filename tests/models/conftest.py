import pytest

from tests.families import FAMILIES


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param
