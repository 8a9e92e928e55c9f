"""Write the Python packages of the image as CycloneDX 1.6 JSON: `make sbom` writes dist/openapi-tool.cdx.json.

Reproducible: the same lock gives the same bytes. It contains no time; the serial number is derived from the content.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

import openapi_tool
from scripts.licences import LOCK, ROOT, Package, packages

TARGET = ROOT / "dist" / "openapi-tool.cdx.json"


def sbom() -> dict[str, Any]:
    """Return the document."""
    itself = f"pkg:pypi/openapi-tool@{openapi_tool.__version__}"
    components = [_component(package) for package in packages()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, itself + LOCK.read_text(encoding='utf-8'))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": itself,
                "name": "openapi-tool",
                "version": openapi_tool.__version__,
                "purl": itself,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": components,
        "dependencies": [{"ref": itself, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _component(package: Package) -> dict[str, Any]:
    """Return a package with the hashes of all its files; an installation uses one of them."""
    purl = f"pkg:pypi/{package.name}@{package.version}"
    hashes = [{"alg": "SHA-256", "content": digest} for digest in package.hashes]
    marker = [{"name": "openapi-tool:marker", "value": package.marker}] if package.marker else []
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        "licenses": [{"expression": package.licence}] if package.licence else [],
        "externalReferences": [{"type": "distribution", "url": purl, "hashes": hashes}],
        **({"properties": marker} if marker else {}),
    }


def main() -> int:
    """Write the document and print its path."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(sbom(), indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{TARGET.relative_to(ROOT)}: {sum(1 for _ in packages())} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
