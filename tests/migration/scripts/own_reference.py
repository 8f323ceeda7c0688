"""DPO against a reference that the script makes and moves itself, with a collator and a chat format of older TRL."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide import (
    DataCollatorForPreference,
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    SyncRefModelCallback,
    create_reference_model,
    get_kbit_device_map,
    get_quantization_config,
    setup_chat_format,
)

if __name__ == "__main__":
    name, data, output = sys.argv[1:4]
    model_args = ModelConfig(model_name_or_path=name)
    quantization_config = get_quantization_config(model_args)
    model_kwargs = {
        "revision": model_args.model_revision,
        "device_map": get_kbit_device_map() if quantization_config is not None else None,
        "quantization_config": quantization_config,
        "dtype": model_args.dtype,
    }
    model = AutoModelForCausalLM.from_pretrained(name, **model_kwargs)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = None
    model, tokenizer = setup_chat_format(model, tokenizer)
    ref_model = create_reference_model(model)

    args = DPOConfig(
        output_dir=output, max_steps=2, use_cpu=True, report_to="none", ref_model_sync_steps=1, learning_rate=1e-2
    )
    trainer = DPOTrainer(
        model,
        ref_model,
        args=args,
        data_collator=DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id),
        train_dataset=load_dataset(data, split="train"),
        processing_class=tokenizer,
    )
    trainer.add_callback(SyncRefModelCallback(ref_model, trainer.accelerator))
    trainer.train()
    trainer.save_model(output)
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    args = DPOConfig(
        output_dir=output,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        model_init_kwargs={"dtype": "float32", "use_cache": False},
    )
    trainer = DPOTrainer(name, args=args, train_dataset=load_dataset(data, split="train"), peft_config=adapters)
    trainer.train()
