"""Expert surgery: fewer experts in every MoE layer of a trained model, by merging or dropping them."""
