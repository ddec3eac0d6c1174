"""The JobSet that launch/gke_jobset.yaml and .py make, against the API: ``python -m
tests.launchers.jobset_schema FILE``, in ``make lint``.

Of JobSet's own types (jobset.x-k8s.io/v1alpha2, ``api/jobset/v1alpha2/jobset_types.go`` of
kubernetes-sigs/jobset) and of Job's, pods' and containers' (batch/v1, core/v1) every field that is
used is described; any other is an error, as it is for a server that validates strictly. Where two
fields have to agree, which no schema can say and the servers' webhooks check, ``problems`` does.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

TEXT, FLAG = {"type": "string", "minLength": 1}, {"type": "boolean"}
NATURAL = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
# RFC 1123
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS = {"type": "array", "items": TEXT}


def thing(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(item: Any, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": least}


def mapping(values: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


# core/v1
QUANTITY = {"anyOf": [NATURAL, {"type": "string", "pattern": r"^[0-9.]+([KMGTPE]i?|m|k)?$"}]}
SOURCE = thing("fieldRef", fieldRef=thing("fieldPath", fieldPath=TEXT, apiVersion=TEXT))
VARIABLE = thing(
    "name",
    name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    value={"type": "string"},
    valueFrom=SOURCE,
)
CONTAINER = thing(
    "name image",
    name=LABEL,
    image=TEXT,
    command=TEXTS,
    args=TEXTS,
    env=many(VARIABLE | {"not": {"required": ["value", "valueFrom"]}}),
    resources=thing(limits=mapping(QUANTITY), requests=mapping(QUANTITY)),
    volumeMounts=many(
        thing("name mountPath", name=LABEL, mountPath=TEXT, readOnly=FLAG, subPath=TEXT)
    ),
)
VOLUME = thing(
    "name persistentVolumeClaim",
    name=LABEL,
    persistentVolumeClaim=thing("claimName", claimName=TEXT, readOnly=FLAG),
)
POD = thing(
    "containers restartPolicy",
    containers=many(CONTAINER, 1),
    volumes=many(VOLUME),
    nodeSelector=mapping(
        {
            "type": "string",
            "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
            "maxLength": 63,
        }
    ),
    restartPolicy={"enum": ["OnFailure", "Never"]},  # of a Job's pods
)
METADATA = thing(
    "", name=LABEL, namespace=LABEL, labels=mapping(TEXT), annotations=mapping({"type": "string"})
)
# batch/v1
EXIT_CODES = thing(
    "operator values",
    containerName=LABEL,
    operator={"enum": ["In", "NotIn"]},
    values=many({"type": "integer"}, 1),
)
POD_FAILURE = thing(
    "action onExitCodes",
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=EXIT_CODES,
)
JOB = thing(
    "template",
    parallelism=NATURAL,
    completions=NATURAL,
    backoffLimit=NATURAL,
    completionMode={"enum": ["NonIndexed", "Indexed"]},
    podFailurePolicy=thing("rules", rules=many(POD_FAILURE)),
    template=thing("spec", metadata=METADATA, spec=POD),
)
# jobset.x-k8s.io/v1alpha2
RULE_NAME = {
    "type": "string",
    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    "maxLength": 128,
}
ACTIONS = [
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
]
# what a Job gives as the reason of its failure
REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]
RULE = thing(
    "name action",
    name=RULE_NAME,
    action={"enum": ACTIONS},
    onJobFailureReasons=many({"enum": REASONS}),
    targetReplicatedJobs=TEXTS,
)
REPLICATED = thing(
    "name template",
    name=LABEL,
    replicas=NATURAL,
    template=thing("spec", metadata=METADATA, spec=JOB),
)
SCHEMA = thing(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA | {"required": ["name"]},
    spec=thing(
        "replicatedJobs",
        replicatedJobs=many(REPLICATED, 1),
        failurePolicy=thing("", maxRestarts=NATURAL, rules=many(RULE)),
        network=thing("", enableDNSHostnames=FLAG, subdomain=LABEL, publishNotReadyAddresses=FLAG),
    ),
)


def problems(jobset: Any) -> list[str]:
    """What a server would refuse, each with its place; none for a good JobSet."""
    errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(jobset)
    found = [f"{'.'.join(map(str, error.path)) or 'JobSet'}: {error.message}" for error in errors]
    if found:
        return found
    names = [one["name"] for one in jobset["spec"]["replicatedJobs"]]
    if len(set(names)) < len(names):
        found.append(f"replicatedJobs: names {names} are not unique")
    for replicated in jobset["spec"]["replicatedJobs"]:
        where, job = f"replicatedJobs {replicated['name']}", replicated["template"]["spec"]
        pod = job["template"]["spec"]
        last = f"{jobset['metadata']['name']}-{replicated['name']}-{replicated.get('replicas', 1) - 1}-{job.get('completions', 1) - 1}"  # noqa: E501
        if len(last) > 63:
            found.append(
                f"{where}: its last pod's name {last} has {len(last)} characters, and a host name"
                " at most 63"
            )
        if job.get("completionMode") == "Indexed" and "completions" not in job:
            found.append(f"{where}: an Indexed job needs completions")
        if "podFailurePolicy" in job and pod["restartPolicy"] != "Never":
            found.append(f"{where}: podFailurePolicy needs restartPolicy Never")
        containers, volumes = (
            {one["name"] for one in pod["containers"]},
            {one["name"] for one in pod.get("volumes", [])},
        )
        for rule in job.get("podFailurePolicy", {}).get("rules", []):
            codes = rule["onExitCodes"]
            if codes.get("containerName", next(iter(containers))) not in containers:
                found.append(
                    f"{where}: podFailurePolicy names container {codes['containerName']}, there are"
                    f" {sorted(containers)}"
                )
            if codes["operator"] == "In" and 0 in codes["values"]:
                found.append(f"{where}: podFailurePolicy counts status 0, which is success")
        for container in pod["containers"]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    found.append(
                        f"{where}: container {container['name']} mounts {mount['name']}, and"
                        f" volumes are {sorted(volumes)}"
                    )
    return found


def main(file: str) -> None:
    found = problems(yaml.safe_load(Path(file).read_text()))
    for one in found:
        print(f"{file}: {one}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main(sys.argv[1])
