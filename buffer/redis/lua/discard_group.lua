#!lua flags=allow-oom
-- Requires: state pages records record_lists endings
-- INFLIGHT -> RELEASED(reason). ARGV[2..4]: seq, attempt, reason.
if read_leased_record(ARGV[2], ARGV[3]) then
  release_unfinished(ARGV[2], ARGV[4], 'discard')
  wake_trainer_if_ready() -- the group may have blocked the batch
  return {'ok'}
end
return {has_ended_by('discard', ARGV[2], ARGV[3]) and 'ok' or 'lost'}
