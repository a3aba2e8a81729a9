"""The layer inside other libraries' models: thin adapters. Modules in dependency order.

errors          errors of running a checkpoint in another library's model
model_source    a checkpoint directory as a model sees it: config, experts, and the rest as plain tensors
model_class     its config.json -> the class of transformers and that class's config
hf_experts      the module that stands where a transformers model keeps its experts
hf_quantizer    how transformers loads such a model
transformers    load_model, update_weights
"""
