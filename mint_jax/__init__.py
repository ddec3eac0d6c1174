"""mint_jax: many LoRA policies over one resident, frozen base model.

Train many policies at once, export each step as an immutable adapter revision, sample any of them, evaluate and roll
back, without ever building a merged checkpoint. Reading order: ``launch``, ``jobs``, ``train`` and ``rollout``,
``models``, ``lora``.
"""

__version__ = "0.1.0"
