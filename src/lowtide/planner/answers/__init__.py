"""What people ask first, answered from a model's config alone: on which devices a run fits, with which settings, and
what other trainers would be told.
"""
