"""What ``vllm serve`` is told is read as vLLM reads it."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvist.adapters.vllm.options import FLAG, Options
from kvist.doctor.facts import NotKnown, Transfer, Vllm
from kvist.doctor.vllm import read_arguments, read_transfer
from kvist.errors import ConfigError

OURS = Transfer("KvistConnector", "kvist.adapters.vllm", "kv_both", "recompute", {})


def read(text: str) -> Vllm:
    return read_arguments(text, NotKnown("not looked at"))


def test_the_flag_that_we_name_is_right():
    """Read by whoever copies it from our messages, it has nothing amiss."""
    vllm = read(f"model --port 8000 {FLAG}")
    by_name = msgspec.structs.replace(OURS, kv_connector_module_path=None)
    assert vllm == Vllm(vllm.version, by_name, Options(), has_arguments=True)


@pytest.mark.parametrize("between", [" ", "=", "  "])
def test_a_flag_inside_of_quotation_marks_needs_none_of_its_own(between: str):
    """Between single quotation marks there is no room for others: what is JSON is taken as it stands."""
    flag = f"--kv-transfer-config{between}{FLAG.partition(' ')[2].strip(chr(39))}"
    vllm = read(f"model {flag} --no-enable-prefix-caching")
    assert vllm.transfer == msgspec.structs.replace(OURS, kv_connector_module_path=None)
    assert vllm.is_prefix_caching_off
    assert isinstance(read('model --kv-transfer-config {"a": 1').transfer, NotKnown)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("--no-enable-prefix-caching", "is_prefix_caching_off", True),
        ("--no_enable_prefix_caching", "is_prefix_caching_off", True),
        ("--no-enable-prefix-caching --enable-prefix-caching", "is_prefix_caching_off", False),
        ("--enable-prefix-caching --no-enable-prefix-caching", "is_prefix_caching_off", True),
        ("--disable-hybrid-kv-cache-manager", "is_hybrid_off", True),
        ("--enable-sleep-mode", "has_sleep_mode", True),
        ("--calculate-kv-scales", "has_computed_scales", True),
        ("--block-size 32", "block_tokens", 32),
        ("--block_size=32 --block-size 16", "block_tokens", 16),
        ("--mamba-block-size 32", "block_tokens", None),
        ("--prefill-context-parallel-size 2", "num_prefill_ranks", 2),
        ("--config v.yaml", "config_file", "v.yaml"),
    ],
)
def test_flags(text: str, field: str, value: object):
    """With a space or an equals sign, dashes or underscores; the last one counts."""
    assert getattr(read(f"model {text}"), field) == value


def test_keys_of_the_transfer_can_be_flags():
    """A flag with a dot sets one key, above what the flag without one says."""
    vllm = read(
        f"m {FLAG} --kv-transfer-config.kv_load_failure_policy fail "
        "--kv-transfer-config.kv_connector_extra_config.chunk_tokens=128"
    )
    assert isinstance(vllm.transfer, Transfer)
    assert vllm.transfer.kv_load_failure_policy == "fail"
    assert vllm.options == Options(chunk_tokens=128)


def test_without_a_policy_it_is_vllms_own():
    """What is not said fails requests, as vLLM's default does."""
    vllm = read_transfer('{"kv_connector":"KvistConnector","kv_role":"kv_both"}', "0.32.0")
    assert vllm.transfer == Transfer("KvistConnector", None, "kv_both", "fail", {})
    assert not vllm.has_arguments


def test_ours_is_found_among_several():
    """Below a MultiConnector it is our child that counts, with the failure policy of the whole."""
    ours = {"kv_connector": "KvistConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/s"}}
    whole = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other", "kv_role": "kv_both"}, ours]},
    }  # fmt: skip
    vllm = read_transfer(json.dumps(whole), "0.32.0")
    assert vllm.transfer == Transfer("KvistConnector", None, "kv_both", "recompute", {"socket": "/s"})
    assert vllm.options == Options(socket="/s")
    whole["kv_connector_extra_config"]["connectors"].pop()
    assert read_transfer(json.dumps(whole), "0.32.0").transfer.kv_connector == "MultiConnector"


@pytest.mark.parametrize(
    "text", ["{", "3", "[]", '"x"', '{"kv_connector":3}', '{"kv_connector_extra_config":[]}', "{} x", ""]
)
def test_what_is_no_configuration_is_not_known(text: str):
    """Whatever it is, it has a reason, and is not guessed."""
    vllm = read_transfer(text, "0.32.0")
    assert isinstance(vllm.transfer, NotKnown)
    assert vllm.transfer.because


def test_a_key_below_what_is_no_object_is_not_known():
    """A flag with dots cannot go into a text."""
    vllm = read("m --kv-transfer-config.kv_role kv_both --kv-transfer-config.kv_role.x 3")
    assert isinstance(vllm.transfer, NotKnown)
    assert "kv_role is 'kv_both'" in vllm.transfer.because


def test_wrong_options_are_named():
    """An option that does not exist is not known, and the reason names it and the ones that do."""
    vllm = read_transfer('{"kv_connector":"KvistConnector","kv_connector_extra_config":{"sokcet":"/s"}}', "0.32.0")
    assert isinstance(vllm.options, NotKnown)
    assert "sokcet" in vllm.options.because
    assert "chunk_tokens" in vllm.options.because


def test_what_is_no_command_line_is_refused():
    """A quotation that does not end."""
    with pytest.raises(ConfigError, match="--vllm: No closing quotation"):
        read("model '--x")
