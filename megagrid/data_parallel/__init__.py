"""FSDP over the dp axis, and over no other."""
