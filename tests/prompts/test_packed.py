import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.prompts.packed import ALIGNMENT, ARRAYS, from_bytes, pack, to_bytes, unpack
from llmfoundry_gauntlet.values import Example, Item, ItemKey, ScoreRequest

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))


@st.composite
def items(draw) -> list[Item]:
    """Items whose choices follow one or several contexts."""
    made = []
    for row in range(draw(st.integers(0, 5))):
        contexts = draw(st.lists(IDS, min_size=1, max_size=3))
        places = draw(st.lists(st.integers(0, len(contexts) - 1), min_size=1, max_size=4))
        request = ScoreRequest(
            key=ItemKey(task='t/0-shot', row=7 * row),
            contexts=tuple(contexts[place] for place in places),
            continuations=tuple(draw(IDS) for _ in places),
            truncated=draw(st.booleans()),
            unscorable=draw(st.sampled_from([None, 'too long', 'nothing left'])),
        )
        sha256 = draw(st.binary(min_size=32, max_size=32)).hex()
        made.append(
            Item(
                cluster='',
                content=f'row {row}',
                category=draw(st.sampled_from([None, 'sums'])),
                prompt_sha256=sha256,
                request=request,
            )
        )
    return made


def written(made: list[Item]) -> np.ndarray:
    return np.frombuffer(b''.join(to_bytes(pack(made))), np.uint8)


def plain(item: Item) -> tuple:
    request = item.request
    places = [[a is b for b in request.contexts] for a in request.contexts]
    arrays = [(ids.dtype, ids.tolist()) for ids in (*request.contexts, *request.continuations)]
    return (
        (item.content, item.category, item.prompt_sha256, request.key, request.truncated, request.unscorable),
        places,
        arrays,
    )


@given(items())
def test_items_come_back_from_bytes_as_they_were(made: list[Item]):
    examples = [Example(row=item.request.key.row, content=item.content, category=item.category) for item in made]
    back = list(unpack(from_bytes(written(made)), 't/0-shot', examples))
    assert [plain(item) for item in back] == [plain(item) for item in made]


@given(items())
def test_arrays_are_aligned_views_of_the_bytes(made: list[Item]):
    content = np.zeros(len(written(made)) + ALIGNMENT, np.uint8)
    start = -content.ctypes.data % ALIGNMENT
    content = content[start : start + len(written(made))]
    content[:] = written(made)
    packed = from_bytes(content)
    for array in (getattr(packed, name) for name in ARRAYS):
        assert array.size == 0 or (np.shares_memory(array, content) and array.ctypes.data % ALIGNMENT == 0)


@given(items(), st.data())
def test_a_changed_byte_or_a_cut_end_is_noticed(made: list[Item], data):
    content = written(made)
    place = data.draw(st.integers(0, len(content) - 1))
    changed = content.copy()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert from_bytes(changed) is None
    assert from_bytes(content[:place]) is None


@given(st.binary(max_size=100))
def test_other_bytes_are_no_items(content: bytes):
    assert from_bytes(np.frombuffer(content, np.uint8)) is None
