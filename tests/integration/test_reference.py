"""The recorded fixtures against llm-foundry itself, in the environment of `make reference`."""

import json
import os
import subprocess

import pytest
from paths import FIXTURES, ROOT, SHARED_DATA

PYTHON = ROOT / '.venv-reference' / 'bin' / 'python'


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('model', ['rotary_bos', 'alibi_pad_eos'])
def test_recording_again_gives_the_same_fixture(model: str, tmp_path):
    if not PYTHON.exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    if not SHARED_DATA.is_dir():
        pytest.skip('the real evaluation files (../shared/data/local_data) are not here')
    subprocess.run(
        [PYTHON, 'scripts/record_reference.py', '--models', model, '--out', tmp_path],
        cwd=ROOT,
        check=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    recorded, again = (
        json.loads((folder / f'{model}.json').read_text()) for folder in (FIXTURES / 'reference', tmp_path)
    )
    assert again['model_sha256'] == recorded['model_sha256']
    for old, new in zip(recorded['cases'], again['cases'], strict=True):
        assert (new['name'], new['rows'], new['task']) == (old['name'], old['rows'], old['task'])
        assert new['prompts'] == old['prompts']
        for item, repeated in zip(old['items'], new['items'], strict=True):
            assert repeated['prediction'] == item['prediction']
            assert repeated['losses'] == pytest.approx(item['losses'], abs=1e-5)
        assert new['metrics'] == pytest.approx(old['metrics'], abs=1e-6)
