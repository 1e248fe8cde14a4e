import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.tasks.encode import EncodedItem
from llmfoundry_gauntlet.tasks.token_cache import ALIGNMENT, ARRAYS, from_bytes, pack, to_bytes, unpack

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))


@st.composite
def items(draw) -> list[EncodedItem]:
    """Draw items whose choices follow one or several contexts."""
    made = []
    for _ in range(draw(st.integers(0, 5))):
        contexts = draw(st.lists(IDS, min_size=1, max_size=3))
        places = draw(st.lists(st.integers(0, len(contexts) - 1), min_size=1, max_size=4))
        made.append(
            EncodedItem(
                contexts=tuple(contexts[place] for place in places),
                continuations=tuple(draw(IDS) for _ in places),
                prompt_sha256=draw(st.binary(min_size=32, max_size=32)).hex(),
                truncated=draw(st.booleans()),
                unscorable=draw(st.sampled_from([None, 'too long', 'nothing left'])),
                max_new_tokens=draw(st.integers(0, 9)),
            )
        )
    return made


def written(made: list[EncodedItem]) -> np.ndarray:
    return np.frombuffer(b''.join(to_bytes(pack(made))), np.uint8)


def plain(item: EncodedItem) -> tuple:
    places = [[a is b for b in item.contexts] for a in item.contexts]
    arrays = [(ids.dtype, ids.tolist()) for ids in (*item.contexts, *item.continuations)]
    return (item.prompt_sha256, item.truncated, item.unscorable, item.max_new_tokens), places, arrays


@given(items())
def test_items_survive_the_round_trip_to_bytes(made: list[EncodedItem]):
    assert [plain(item) for item in unpack(from_bytes(written(made)))] == [plain(item) for item in made]


@given(items())
def test_arrays_are_aligned_views_of_the_bytes(made: list[EncodedItem]):
    content = np.zeros(len(written(made)) + ALIGNMENT, np.uint8)
    start = -content.ctypes.data % ALIGNMENT
    content = content[start : start + len(written(made))]
    content[:] = written(made)
    packed = from_bytes(content)
    for array in (getattr(packed, name) for name in ARRAYS):
        assert array.size == 0 or (np.shares_memory(array, content) and array.ctypes.data % ALIGNMENT == 0)


@given(items(), st.data())
def test_a_changed_byte_or_a_truncated_end_is_noticed(made: list[EncodedItem], data):
    content = written(made)
    place = data.draw(st.integers(0, len(content) - 1))
    changed = content.copy()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert from_bytes(changed) is None
    assert from_bytes(content[:place]) is None


@given(st.binary(max_size=100))
def test_other_bytes_are_rejected(content: bytes):
    assert from_bytes(np.frombuffer(content, np.uint8)) is None
