"""Many ranks as one worker: how they are started, what they are told, how their end is noticed."""
