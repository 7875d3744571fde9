"""Local names -> global names."""

import pytest
from weightbus.producers.megatron_names import global_name, is_expert

NUMBERS = {"decoder.layers.0": 4, "decoder.layers.1": 9, "mtp.layers.0": 2}


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.8.mlp.linear_fc1.weight"),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight1",
            "decoder.layers.3.mlp.experts.linear_fc1.weight7",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.bias0",
            "decoder.layers.3.mlp.experts.linear_fc2.bias6",
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight",
            "decoder.layers.3.mlp.experts.local_experts.8.linear_fc2.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight0",
            "mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight6",
        ),
        (
            "mtp.layers.0.mtp_model_layer.mlp.router.weight",
            "mtp.layers.1.mtp_model_layer.mlp.router.weight",
        ),
        ("decoder.layers.7.x.weight", "decoder.layers.7.x.weight"),
    ],
)
def test_layers_and_experts_become_global(local: str, expected: str) -> None:
    assert global_name(local, NUMBERS, first_expert=6) == expected


def test_a_prefix_of_a_vision_language_model_is_kept() -> None:
    numbers = {"language_model.decoder.layers.0": 3}
    name = global_name("language_model.decoder.layers.0.mlp.linear_fc2.weight", numbers, 0)
    assert name == "language_model.decoder.layers.2.mlp.linear_fc2.weight"


def test_shared_experts_are_ordinary() -> None:
    assert is_expert("decoder.layers.0.mlp.experts.linear_fc1.weight0")
    assert not is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
