"""Names of experiments that sort by their start: `bert_pretrain.2026.11.22.12.05.59.3f8a1c07`.

Source: microsoft/DeepSpeedExamples, training/HelloDeepSpeed/train_bert.py, `create_experiment_dir`.
"""

from __future__ import annotations

import time

from megatron.observe.naming.run_names import Choose

PLACE = "{experiment}"
_KIND = "bert_pretrain"


def experiment_name(choose: Choose, at: time.struct_time) -> str:
    """A name with the kind of the experiment, the second of its start, and eight hexadecimal digits.

    Args:
        choose: draws one of several characters.
    """
    return f"{_KIND}.{time.strftime('%Y.%m.%d.%H.%M.%S', at)}.{''.join(choose('0123456789abcdef') for _ in range(8))}"
