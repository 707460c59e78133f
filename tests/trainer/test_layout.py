"""A gang that the model cannot be cut for is refused before it starts, not found out by every start."""

import pytest
from motley_trainer.source import SourceError, check_layout
from trainer.kit import write_model

MOE = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("tensor", "expert", "message"),
    [
        (4, 1, "trainer.tensorParallel: 4 must divide the model's num_key_value_heads, 2"),
        (3, 1, "trainer.tensorParallel: 3 must divide the model's num_attention_heads, 4"),
        (1, 3, "trainer.expertParallel: 3 must divide the model's num_experts, 8"),
    ],
)
def test_what_does_not_divide_is_named(tmp_path, tensor, expert, message):
    model = write_model(tmp_path / "model", **MOE)
    check_layout(str(model), tensor=2, expert=4)
    with pytest.raises(SourceError, match=message) as refused:
        check_layout(str(model), tensor=tensor, expert=expert)
    assert refused.value.reason == "LayoutImpossible"


def test_a_model_without_experts_has_none_to_share_out(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    check_layout(str(tmp_path), tensor=4, expert=1)
    with pytest.raises(SourceError, match="must be 1 for a model without experts, got 2"):
        check_layout(str(tmp_path), tensor=1, expert=2)


def test_a_config_that_is_not_json_is_a_model_that_is_not_there(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json must be JSON"):
        check_layout(str(tmp_path), tensor=1, expert=1)
