"""A session of Tinker's SDK, for versions before protobuf too: ``python old_client.py URL [KEY]``,
where only the SDK is installed.

Prints OK and exits with 0 where all was as it should be. With mindlab-toolkit installed, MinT's own
requests are made as well. It imports nothing of ours: ``make test-old-clients`` runs it under the
versions that are in use.
"""

import importlib
import importlib.util
import os
import sys

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

N = 20


def datum(seed: int) -> types.Datum:
    tokens = [(7 * seed + 13 * i) % 900 + 3 for i in range(N + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * N}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def losses(result) -> float:
    """The sum of the loss, which the log-probabilities agree with."""
    total = -sum(sum(map(float, output["logprobs"].data)) for output in result.loss_fn_outputs)
    assert abs(total - result.metrics["loss:sum"]) < 1e-3 * abs(total), (total, result.metrics)
    return total


def train(service, data):
    """A client whose policy was updated twice."""
    client = service.create_lora_training_client(base_model="tiny-random", rank=8)
    assert client.get_info().model_data.model_name == "tiny-random"
    before = losses(client.forward(data, "cross_entropy").result())
    for _ in range(2):
        passed, updated = (
            client.forward_backward(data, "cross_entropy"),
            client.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        losses(passed.result())
        updated.result()
    assert losses(client.forward(data, "cross_entropy").result()) < before
    return client


def resume(service, client, data) -> None:
    """Both ways to load a state give the same policy."""
    path = client.save_state("state").result().path
    wanted = losses(client.forward(data, "cross_entropy").result())
    resumed = service.create_training_client_from_state(path)
    loaded = service.create_lora_training_client(base_model="tiny-random", rank=8)
    loaded.load_state(path).result()
    for one in (resumed, loaded):
        assert abs(losses(one.forward(data, "cross_entropy").result()) - wanted) < 1e-4 * abs(
            wanted
        )


def sample(service, client) -> str:
    """A path and an ephemeral sampler are the same weights; the path."""
    path = client.save_weights_for_sampler("sampled").result().path
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=5, seed=1)
    samplers = [service.create_sampling_client(model_path=path)]
    samplers.append(client.save_weights_and_get_sampling_client("again"))
    options = {"prompt": prompt, "sampling_params": params}
    first, second = (one.sample(num_samples=2, **options).result() for one in samplers)
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert all(len(one.tokens) == len(one.logprobs) for one in first.sequences)
    assert len(samplers[0].compute_logprobs(prompt).result()) == 3
    base = service.create_sampling_client(base_model="tiny-random")
    base.sample(num_samples=1, **options).result()
    return path


def rest(service, client, path: str) -> None:
    """Lists runs and checkpoints."""
    client_of_rest = service.create_rest_client()
    listed = client_of_rest.list_checkpoints(client.model_id).result().checkpoints
    assert path in [one.tinker_path for one in listed]
    runs = client_of_rest.list_training_runs().result().training_runs
    assert client.model_id in [run.training_run_id for run in runs]
    assert client_of_rest.get_training_run(client.model_id).result().base_model == "tiny-random"
    client_of_rest.delete_checkpoint(client.model_id, "weights/state").result()


def extras(service, client, path: str) -> None:
    """What MinT's own client asks."""
    mintx = importlib.import_module("mint.mint")

    other = client.save_weights_for_sampler("other").result().path
    made = mintx.interpolate_checkpoints(
        service, source_paths=[path, other], coefficients=[0.5, 0.5], output_path="sum"
    )
    assert made.path == f"tinker://{client.model_id}/sampler_weights/sum", made
    prompt = types.ModelInput.from_ints([5, 6, 7])
    summed, alone = (
        service.create_sampling_client(model_path=one).compute_logprobs(prompt).result()
        for one in (made.path, path)
    )
    same = "half of one and half of the same"
    assert all(abs(a - b) < 1e-3 for a, b in zip(summed[1:], alone[1:])), same
    targets = types.TensorData(data=[9], dtype="int64", shape=[1])
    weights = types.TensorData(data=[1.0], dtype="float32", shape=[1])
    datum = mintx.ReverseKLDatum(
        student_input=prompt, reference_input=prompt, target_tokens=targets, weights=weights
    )
    told = ""
    try:
        mintx.forward_backward_reverse_kl(client, reference_model_path=path, data=[datum])
    except (tinker.RequestFailedError, tinker.BadRequestError) as refused:
        told = str(refused)
    assert "importance_sampling" in told, "the reverse KL was not refused"
    print("mindlab-toolkit", mintx.MINT_VERSION, "as it should be")


def main(url: str, key: str = "tml-any") -> None:
    print("tinker", tinker.__version__)
    toolkit = importlib.util.find_spec("mint") is not None
    if toolkit:
        importlib.import_module("mint")  # it lets keys sk-... through
    service = tinker.ServiceClient(base_url=url, api_key=key)
    assert "tiny-random" in [
        model.model_name for model in service.get_server_capabilities().supported_models
    ]
    data = [datum(seed) for seed in range(3)]
    client = train(service, data)
    resume(service, client, data)
    path = sample(service, client)
    rest(service, client, path)
    if toolkit:
        extras(service, client, path)
    if hasattr(client, "unload_model"):
        client.unload_model().result()
    print("OK")


if __name__ == "__main__":
    main(*sys.argv[1:])
