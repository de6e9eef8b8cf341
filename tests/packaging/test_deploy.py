"""The files in ``deploy`` say what the program accepts, and agree with each other about what both ends must share."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvist.server.config import ServeConfig, load_config
from kvist.units import parse_nbytes
from tests.packaging.command_lines import check_command, check_environment, check_kvist, check_vllm
from tests.packaging.conftest import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "kvist.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SOCKET = "/run/kvist/kvist.sock"


def pod(name: str) -> dict:
    """Return what the pods of a manifest are made from."""
    return yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())["spec"]["template"]["spec"]


def container(name: str) -> dict:
    (found,) = pod(name)["containers"]
    return found


def environment(name: str) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(name)["env"]}


def instructions(text: str, name: str) -> Iterator[str]:
    """Yield what follows an instruction of a Dockerfile, or a key of a unit."""
    joined = text.replace("\\\n", " ")
    yield from re.findall(rf"^{name}[ =](.*)$", joined, re.MULTILINE)


def test_the_unit_starts_what_is_there():
    """The unit's command is one of the program's, and its limits and its time to start are those of a large pool."""
    text = UNIT.read_text()
    (start,) = instructions(text, "ExecStart")
    assert check_command(start.split()) == "kvist"
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert settings["Type"] == "notify"
    assert (settings["LimitMEMLOCK"], settings["TimeoutStartSec"]) == ("infinity", "infinity")
    assert SOCKET.startswith(f"/run/{settings['RuntimeDirectory']}/")
    assert start.split()[-2:] == ["--socket", SOCKET]
    assert float(settings["TimeoutStopSec"]) > ServeConfig().drain_s
    assert settings.keys().isdisjoint({"PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateIPC"})


def test_systemd_accepts_the_unit(tmp_path: Path):
    """systemd finds nothing to complain about, but for the program's place, which is another here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvist/bin/kvist", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_the_image_runs_what_is_there():
    """Entry point, arguments and health check of the image are commands of the program; who runs them is not root."""
    text = DOCKERFILE.read_text()
    (entry,), (arguments,), (check,) = (list(instructions(text, name)) for name in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    assert json.loads(entry) == ["kvist"]
    check_kvist(json.loads(arguments))
    assert check_command(json.loads(check.partition(" CMD ")[2])) == "kvist"
    assert list(instructions(text, "STOPSIGNAL")) == ["SIGTERM"]
    assert list(instructions(text, "USER")) == ["${UID}"]
    assert list(instructions(text, "ARG")) == ["UID=1000"]
    variables = dict(pair.split("=", 1) for line in instructions(text, "ENV") for pair in line.split())
    check_environment(variables)
    assert load_config(None, {}, {"KVIST_SOCKET": variables["KVIST_SOCKET"]}).socket_path == SOCKET


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile"])
def test_images_install_what_is_there(name: str):
    """Extras that an image installs exist; what it copies is let through, and little else is sent to the builder."""
    text = (DEPLOY / "docker" / name).read_text()
    (line,) = (line for line in instructions(text, "RUN") if "pip install" in line)
    words = line.rpartition("pip install")[2].replace("'", "").split()
    assert check_command(["pip", "install", *words]) == "pip"
    copied = [word for line in instructions(text, "COPY") if "--from" not in line for word in line.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    ignored = (DEPLOY / "docker" / f"{name}.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


def test_the_daemons_pod_runs_what_is_there():
    """Arguments and probes of the daemon's pods are commands of the program, and their variables its options."""
    daemon = container("kvist")
    check_kvist(daemon["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert check_command(daemon[probe]["exec"]["command"]) == "kvist"
        assert daemon[probe]["timeoutSeconds"] > 5, "kvist status itself waits for 5 s"
    check_environment(environment("kvist"))


def test_the_pool_fits_into_the_pod():
    """The memory that the daemon's pod may use is more than its pool, all of which is present from the start."""
    daemon = container("kvist")
    pool = parse_nbytes(daemon["args"][daemon["args"].index("--pool") + 1])
    limit = parse_nbytes(daemon["resources"]["limits"]["memory"] + "B")
    assert limit > pool
    assert daemon["resources"]["requests"]["memory"] == daemon["resources"]["limits"]["memory"]
    startup = daemon["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 1.5 * pool / 2**30, "before the daemon answers"


def test_the_daemon_sees_the_engines():
    """The daemon watches processes of other pods, uses GPUs and claims none, and gets no variables of services."""
    spec = pod("kvist")
    assert (spec["hostPID"], spec["hostIPC"], spec["enableServiceLinks"]) == (True, True, False)
    assert environment("kvist")["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert not any("gpu" in name for name in container("kvist")["resources"]["limits"])


def test_engine_and_daemon_meet():
    """Both pods have one user, one directory of the host and one socket in it, and the engine's flag names it."""
    engine, daemon = container("vllm"), container("kvist")
    words = [*engine["command"], *engine["args"]]
    assert check_command(words) == "vllm"
    check_vllm(words[1:])
    flag = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert flag["kv_connector_extra_config"]["socket"] == environment("kvist")["KVIST_SOCKET"] == SOCKET
    assert engine["securityContext"]["runAsUser"] == daemon["securityContext"]["runAsUser"] == 1000
    (directory,) = pod("kvist")["initContainers"]
    assert directory["command"][:4] == ["install", "-d", "-o", "1000"]
    mounts = [
        (volume["hostPath"]["path"], mount["mountPath"])
        for name in ("kvist", "vllm")
        for volume in pod(name)["volumes"]
        for mount in container(name)["volumeMounts"]
        if "hostPath" in volume and volume["name"] == mount["name"]
    ]
    assert mounts == [("/run/kvist", "/run/kvist")] * 2
    assert pod("vllm")["hostIPC"] is True
