"""Parts of `experiments/make_base_model.py`: tokenizer, synthetic text, training, skills."""
