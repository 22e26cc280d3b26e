"""The example in the format's description is a manifest."""

import json
import re
from pathlib import Path

from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.manifest import parse_manifest

README = Path(__file__).parents[2] / "manifests/README.md"


def test_the_example_parses_and_has_the_digest_it_says():
    text = README.read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]
    digest = re.search(r"its digest is `([0-9a-f]{64})`", text)[1]
    parse_manifest(canonical_json(json.loads(example)), digest)
