"""Train with llm-foundry itself, in its environment; write the results of our callback and the weights.

python foundry_worker.py CONFIG.yaml OUT
"""

import json
import sys
from pathlib import Path

from llmfoundry.command_utils import train_from_yaml

from llmfoundry_gauntlet import EvalGauntlet


def main(config: str, out: Path) -> None:
    trainer = train_from_yaml(config)
    callback = next(callback for callback in trainer.state.callbacks if isinstance(callback, EvalGauntlet))
    found = {
        'class': type(trainer.state.model).__name__,
        'batch': trainer.state.timestamp.batch.value,
        'metrics': dict(callback.evaluation.metrics),
        'max_seq_len': callback.settings.max_seq_len,
        'interval': callback.settings.interval,
    }
    trainer.close()
    trainer.state.model.model.save_pretrained(out / 'model')
    trainer.state.model.tokenizer.save_pretrained(out / 'model')
    (out / 'found.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]))
