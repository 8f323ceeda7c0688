"""What a field of an options class is."""

from lowtide.methods.dpo import DPOOptions


def test_a_default_that_is_a_list_is_each_configs_own():
    one, other = DPOOptions(), DPOOptions()
    assert isinstance(one.loss_type, list)
    one.loss_type.append("sft")
    assert other.loss_type == DPOOptions().loss_type == ["sigmoid"]
