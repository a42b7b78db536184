SELECT txid_current_if_assigned() IS NOT NULL AS anon_1
