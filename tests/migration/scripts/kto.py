"""KTO from a command line, the way of TRL's script of this name. Of TRL's, only the import is another."""

from accelerate.logging import get_logger
from datasets import load_dataset

from lowtide import (
    DatasetMixtureConfig,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

logger = get_logger(__name__)


def main(script_args, training_args, model_args, dataset_args):
    model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if training_args.model_init_kwargs is not None:
        model_init_kwargs.update(training_args.model_init_kwargs)
    training_args.model_init_kwargs = model_init_kwargs

    if dataset_args.datasets:
        if script_args.dataset_name:
            logger.warning("dataset_name is not read, since there are datasets")
        dataset = get_dataset(dataset_args)
    else:
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )

    evaluates = training_args.eval_strategy != "no"
    trainer = KTOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")
    trainer.end()
    return trainer


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, KTOConfig, ModelConfig, DatasetMixtureConfig))
    trainer = main(*parser.parse_args_and_config(fail_with_unknown_args=False))
