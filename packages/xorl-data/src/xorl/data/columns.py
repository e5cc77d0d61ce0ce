"""Names of columns that readers and formats agree on."""

from __future__ import annotations

# The columns of tokenized rows that are read if no columns are selected.
COLUMNS = ("input_ids", "labels", "attention_mask")

# Keys that include a message in training (true) or exclude it (false), as in other trainers.
TRAIN_KEYS = ("train", "training", "trainable", "loss", "weight")
# Keys that mask or weight messages in other trainers, with meanings that differ between them or that xorl lacks.
FOREIGN_MASKS = (
    *("mask", "masked", "loss_mask", "train_detail", "loss_weight", "loss_weights", "loss_scale", "weights"),
    *("train_on", "train_on_turn", "train_on_input", "train_on_inputs", "mask_prompt", "mask_history", "no_loss"),
    *("trained", "is_trained", "ignore_loss", "sample_weight", "sample_weights", "example_weight"),
    *("assistant_mask", "assistant_masks", "completion_mask", "prompt_mask", "labels_mask", "label_mask"),
    *("response_mask", "answer_mask", "target_mask", "train_mask", "step_loss_mask", "loss_masking_spans"),
    *("token_weights", "loss_multiplier", "is_masked", "should_train"),
)
ROW_MASKS = (*TRAIN_KEYS, *FOREIGN_MASKS)
# Columns that readers of columnar files return, if they exist, in addition to those that a format requests.
OPTIONAL_COLUMNS = (*ROW_MASKS, "system", "history", "tools", "chat_template_kwargs")
