"""JSON bodies of Tinker's API.

A training request with a valid place (model and number) is accepted; any other mistake fails its
future. The class of its place is therefore validated first, and OpenAPI documents the place only.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, model_validator

from mint_jax.service.validation import Body, Number, Place, SeqId, Text
from mint_jax.train.config import OptimizerConfig

REASONS = ("success", "errored", "interrupted")  # of clients that finish a session
MAX_METADATA = 1 << 16  # bytes of JSON of a user's notes
FLOAT32_MAX = 3.4028234663852886e38
Amount = Annotated[float, Field(ge=0, le=FLOAT32_MAX)]
Share = Annotated[float, Field(ge=0, lt=1)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]  # seconds


def _small(value: Any) -> Any:
    if len(json.dumps(value)) > MAX_METADATA:
        raise ValueError(f"has more than {MAX_METADATA} bytes of JSON: give a location instead")
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


class NullableBody(Body):
    """A body whose null fields have their defaults."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: one for key, one in value.items() if one is not None}


class SessionRef(Body):
    session_id: Text


class ModelRef(Body):
    model_id: Text


class ModelPlace(SessionRef):
    """Session and number of a new model. A mistake in a further field fails the future."""

    model_seq_id: Place
    user_metadata: Metadata | None = None


class RequestPlace(ModelRef):
    """Model and number of a training request. A mistake in a further field fails the future."""

    seq_id: SeqId


class CreateSession(Body):
    display_name: Name | None = None
    project_id: Name | None = None
    sdk_version: Name | None = None
    tags: Annotated[list[Any], AfterValidator(_small)] | None = None
    user_metadata: Metadata | None = None


class FinishSession(Body):
    reason: dict[str, Any] | None = None
    detail: str | None = None


class LoraConfig(Body):
    rank: int = 32
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Optimizer(Body):
    type: Literal["adamw", "dimuon"] = "adamw"
    version: Literal[1] = 1


class CreateModel(ModelPlace):
    base_model: Text | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: Optimizer | None = None


class LoadWeights(Body):
    """A checkpoint to load, into a new model of a session or into a model in training."""

    path: Text
    optimizer: bool = False
    base_model: Text | None = None
    optimizer_config: Optimizer | None = None


class LoadPlace(Body):
    session_id: Text | None = None


class AdamParams(NullableBody):
    """Settings of AdamW with Tinker's defaults."""

    learning_rate: Amount = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Amount = 1e-12
    weight_decay: Amount = 0.0
    grad_clip_norm: Amount = 0.0

    def config(self, rank: int) -> OptimizerConfig:
        """Returns the optimizer; its fields are in the same order."""
        return OptimizerConfig(*self.model_dump().values())


class DimuonParams(NullableBody):
    """Settings of dimuon with Tinker's defaults, those included that SDK 0.38 does not send."""

    type: Literal["dimuon"]
    learning_rate: Amount
    beta1: Share = 0.9
    damping: Annotated[Amount, Field(gt=0)] = 1e-4
    grad_clip_norm: Number = 0.0
    rank_lr_correction_exponent: Number = 0.175

    def config(self, rank: int) -> OptimizerConfig:
        """Returns the optimizer of a rank; Tinker corrects learning rates relative to rank 32."""
        rate = self.learning_rate * (rank / 32) ** self.rank_lr_correction_exponent
        clip = max(self.grad_clip_norm, 0.0)
        return OptimizerConfig(
            rate, self.beta1, eps=self.damping, max_grad_norm=clip, kind=self.type
        )


class OptimStep(RequestPlace):
    adam_params: AdamParams | None = None
    optimizer_params: DimuonParams | None = None


class SaveWeights(RequestPlace):
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    age_encryption_recipients: list[Text] | None = None


class SaveForSampler(SaveWeights):
    kind: Literal["snapshot", "inflight"] = "snapshot"
    sampling_session_seq_id: Place | None = None


class CreateSampler(SessionRef):
    sampling_session_seq_id: Place
    model_path: Text | None = None
    base_model: Text | None = None


class RetrieveFuture(Body):
    request_id: Text
    allow_metadata_only: bool = False


class SamplerTarget(Body):
    sampling_session_id: Text
    cloned_sampler_id: Place = 0


class RetrieveFutures(Body):
    target: SamplerTarget
    retrieved_request_ids: list[Text] | None = None
    prev_cursor: Annotated[int, Field(ge=0, lt=2**63)] = 0
    timeout: Number | None = None


class CancelFuture(Body):
    request_id: Text | None = None
    request_ids: list[Text] | None = None


class WeightsInfo(Body):
    tinker_path: Text


class SetTtl(Body):
    ttl_seconds: Ttl | None = None


class CopyWeights(SetTtl):
    source_path: Text
    session_id: Text | None = None
    model_seq_id: Place | None = None
    destination_project_id: Text | None = None


class AssignProject(Body):
    project_id: Name


class Cursor(Body):
    last_created_at: AwareDatetime
    last_session_id: Text


class Owner(Body):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] | None = None


class Status(Body):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchSessions(Body):
    session_id: Text | None = None
    project_ids: list[Any] | None = None
    user_metadata: dict[str, Any] | None = None
    display_name: Text | None = None
    owner: Owner | None = None
    statuses: list[Status] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] | None = None
    cursor: Cursor | None = None


class Interpolate(Body):
    """Revisions to sum, and the coefficient of each. The sum is a new checkpoint."""

    source_paths: Annotated[list[Text], Field(min_length=1)]
    coefficients: Annotated[list[Number], Field(min_length=1)]
    method: Literal["sum", "ties", "dare", "dare_ties"] = "sum"
    density: Number = 1.0
    rank: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 0
    output_checkpoint_type: Literal["sampler"] = "sampler"
    output_path: str | None = None


class ReverseKl(ModelRef):
    seq_id: SeqId | None = None


class SampleRequest(Body):
    """Sampler and number of a sample. A mistake in a further field fails the future."""

    sampling_session_id: Text | None = None
    model_path: Text | None = None
    base_model: Text | None = None
    # a copy of a client numbers its samples from a random number of up to 1e9, times 1e9
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
